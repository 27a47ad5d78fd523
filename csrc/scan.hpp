// One pass over float32 pixels: range and number of values that are not finite.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

namespace st2i {

struct Scan {
  float minimum;          // over the finite values; +inf when there are none
  float maximum;          // over the finite values; -inf when there are none
  std::size_t nonfinite;  // NaN and infinities
};

inline Scan scan(const float *data, std::size_t n) {
  Scan s{std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), 0};
  for (std::size_t i = 0; i < n; ++i) {
    const float x = data[i];
    if (!std::isfinite(x)) {
      ++s.nonfinite;
      continue;
    }
    if (x < s.minimum) s.minimum = x;
    if (x > s.maximum) s.maximum = x;
  }
  return s;
}

}  // namespace st2i
