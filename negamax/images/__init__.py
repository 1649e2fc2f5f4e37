"""Compute the sizes of resized images, and decode images in a process with limits."""
