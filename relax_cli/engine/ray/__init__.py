"""Everything that knows Ray.

Ray reads the switch below when it is imported: with 0 all its processes listen on loopback only. It exists for laptops
whose firewalls complain, and is what a run on one machine needs anywhere.
"""

import os

from relax_cli.preflight.machine import ray_address

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

if not ray_address():
    os.environ.setdefault(LOOPBACK_SWITCH, "0")
