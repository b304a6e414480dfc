"""Integer hashes: numbers that look random, yet are the same on every machine and for every library version."""


def hash64(*values: int) -> int:
    """A 64-bit hash of integers: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) after each."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
