"""One training script, written once for each way to checkpoint it: how much code is it, and what does it survive?"""
