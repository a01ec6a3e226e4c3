"""What the host is. No processor is named: nothing here is compiled for one."""

HOST_CONSTRAINTS = ["@platforms//os:linux"]
