// The unit of every allocation.
#pragma once

#include <cstdint>

namespace st2i {

inline constexpr std::uint64_t kGranule = 64 * 1024;

// Granules that hold `nbytes`; no overflow for any value.
constexpr std::uint64_t granules(std::uint64_t nbytes) {
  return nbytes / kGranule + (nbytes % kGranule != 0);
}

}  // namespace st2i
