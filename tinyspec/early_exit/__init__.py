"""Chapter 2: early exiting. A token leaves the model as soon as the layers that have run are sure
of it.
"""
