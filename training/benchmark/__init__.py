"""What a machine makes of a config: `isobatch bench`."""
