"""The lease of a run on one host: how long its processes may live without their controller.

Two processes hold it, the agent (``node.agent.lease.holder``) and its guard
(``node.agent.lease.guard``). Either is started again by the other when it dies or freezes. When
the lease is over the agent stops everything; if it has not done so soon, the guard does. Nothing
is written before that, so a full disk is no reason to live on.

What is left: if both are killed within the fraction of a second that either needs to start the
other, nobody holds the lease. What they had started then lives until a controller comes back (its
new agent finds the processes by their marker, and holds the lease again) or until ``libra stop``. A
reboot ends processes and holders alike, and starts nothing. Standard library only.
"""
