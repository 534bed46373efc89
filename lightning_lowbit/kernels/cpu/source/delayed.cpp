// Delayed scaling: the amax of an operand is recorded, and the one that scales it is chosen.

#include <cmath>

#include "lanes.h"

// Raises `staged` (null: records nothing) to a finite amax at the places whose bits are set, and writes the amax in
// force or, while it is 0, the operand's own.
EXPORT void lowbit_delayed_amax(const float *own, const float *in_force, float *staged, int32_t places, float *result) {
    const float amax = *own;
    for (int place = 0; staged && std::isfinite(amax) && places >> place; place++)
        if (places >> place & 1 && amax > staged[place]) staged[place] = amax;
    *result = *in_force > 0.0f ? *in_force : amax;
}
