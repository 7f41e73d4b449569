"""What a GPU day is made of: its sections, the file of what they found, and the page."""
