// A file that shrinks under its mapping raises SIGBUS where it is read. Inside a guarded range that becomes a flag and
// pages of zeros, so that the reader comes to an end and the flag can be turned into an error; elsewhere it is as it
// was before.
#pragma once
#include <cstdint>

namespace ete {

// Guards [address, address + nbytes) and returns a handle, or -1 when all slots are taken.
int guard_range(uintptr_t address, uintptr_t nbytes);

// Whether a read inside the range has faulted.
bool guard_faulted(int handle);

void unguard_range(int handle);

}  // namespace ete
