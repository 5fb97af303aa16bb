"""Tests of publication and reception."""
