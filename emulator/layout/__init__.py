"""Where elements lie: index maps of swizzles, descriptors, fragments, tensor memory and tensor maps. Pure functions."""
