"""Media: reads pictures and sounds (paths, bytes, data: addresses, PIL images, arrays, message parts) into Media."""
