// Allocators by name.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "best_fit.hpp"
#include "buddy.hpp"

namespace st2i {

inline std::unique_ptr<Allocator> make_allocator(const std::string &kind, std::int64_t nbytes) {
  if (kind == "best_fit") return std::make_unique<BestFit>(nbytes);
  if (kind == "buddy") return std::make_unique<Buddy>(nbytes);
  throw std::invalid_argument("allocator '" + kind + "' does not exist; there are best_fit, buddy");
}

}  // namespace st2i
