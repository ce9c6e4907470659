"""Has the data changed, what does the network know about it, and can it be repaired without labels?"""
