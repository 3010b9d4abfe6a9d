"""What only an exported package uses: its manifest, its checks at load, calibration and command line."""
