"""Makes Media of pictures and sounds: from paths, bytes, data: addresses, PIL images, arrays and message parts."""
