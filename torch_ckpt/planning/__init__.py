"""What the leaves of a state dict are: names, boxes, containers, what ranks compare of them."""
