"""A diagnosis for people and programs: text, JSON, and one HTML file.

``view.RunView`` is what all of them are given.
"""
