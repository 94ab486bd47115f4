"""Needles: which index, at which budget, still finds a fact that dense attention finds?"""
