"""Which machines a job may use, and what is known of them: hosts and slots, devices, networks, sites, MPIs.

`spread` lays ranks over them.
"""
