"""Hopper: wgmma from shared memory and registers, TMA, mbarriers, register reallocation between warpgroups."""
