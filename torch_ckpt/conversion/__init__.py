"""Every format to each that is written."""
