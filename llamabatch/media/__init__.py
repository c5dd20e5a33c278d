"""Pictures and sounds: reads them (paths, bytes, data: addresses, PIL images, arrays, message parts) into Media."""
