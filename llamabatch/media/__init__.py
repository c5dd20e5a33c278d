"""Makes Media from pictures and audio: paths, bytes, data: addresses, PIL images, arrays and message parts."""
