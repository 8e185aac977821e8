"""Fuzz targets: one module for each thing that reads octets."""
