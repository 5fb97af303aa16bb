"""DeepSpeed's own engine on the CPU, for test_deepspeed.py."""
