"""What an engine needs in life, around the root; each folder behind one door, its __init__."""
