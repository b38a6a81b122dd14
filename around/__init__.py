"""What stands around the root; each folder has one door, its __init__."""
