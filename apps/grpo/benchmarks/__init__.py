"""Measurements that print their figures."""
