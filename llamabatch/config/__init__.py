"""Options of an engine: EngineConfig has the options as requested, and ResolvedConfig has the options with
values in place of "auto". Imports `scheduler` and the packages below it.
"""

from llamabatch.config.keywords import EngineOptions as EngineOptions
from llamabatch.config.options import EngineConfig as EngineConfig
from llamabatch.config.options import with_paths as with_paths
from llamabatch.config.resolved import ResolvedConfig as ResolvedConfig
from llamabatch.config.values import CHOICES as CHOICES
from llamabatch.config.values import CONTENT_OPTIONS as CONTENT_OPTIONS
from llamabatch.config.values import DEVICE_TOP as DEVICE_TOP
from llamabatch.config.values import KV_TYPES as KV_TYPES
from llamabatch.config.values import MAX_BATCH as MAX_BATCH
from llamabatch.config.values import MAX_CTX as MAX_CTX
from llamabatch.config.values import MAX_SLOTS as MAX_SLOTS
from llamabatch.config.values import MIN_CTX as MIN_CTX
from llamabatch.config.values import MIN_GUESSING_UBATCH as MIN_GUESSING_UBATCH
from llamabatch.config.values import ROPE_OPTIONS as ROPE_OPTIONS
from llamabatch.config.values import SPLIT_MODES as SPLIT_MODES
