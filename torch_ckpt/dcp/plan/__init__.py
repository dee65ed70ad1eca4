"""What a state dict's leaves are called, who writes or reads what of them, and the planners."""
