"""Pictures as callers give them (paths, bytes, data: addresses, PIL images, arrays, parts of messages) to Media."""
