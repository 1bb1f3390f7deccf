"""moecomm.formats, which is moecomm.base.formats."""

from moecomm.base.formats import *  # noqa: F403
