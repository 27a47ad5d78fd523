// Copies of every alignment and size: all bytes, and none beside them.
#include "../copy.hpp"

#include <random>
#include <vector>

#include "check.hpp"

using namespace st2i;

namespace {

template <typename Copy>
void copies(Copy copy, std::uint64_t nbytes, std::uint64_t to_at, std::uint64_t from_at) {
  std::mt19937 random(static_cast<unsigned>(nbytes + 64 * to_at + from_at));
  std::vector<char> from(nbytes + 64), to(nbytes + 128, 'x');
  for (char &byte : from) byte = static_cast<char>(random());
  copy(to.data() + to_at, from.data() + from_at, nbytes);
  CHECK(std::memcmp(to.data() + to_at, from.data() + from_at, nbytes) == 0);
  for (std::uint64_t i = 0; i < to.size(); ++i) {
    if (i < to_at || i >= to_at + nbytes) CHECK(to[i] == 'x');
  }
}

}  // namespace

#ifdef __SSE2__
TEST(streamed_copies_of_every_alignment) {
  for (std::uint64_t nbytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 1000}) {
    for (std::uint64_t to_at = 0; to_at < 64; to_at += 3) {
      for (std::uint64_t from_at = 0; from_at < 64; from_at += 7) {
        copies(stream_copy, nbytes, to_at, from_at);
      }
    }
  }
}
#endif

TEST(copies_on_both_sides_of_the_limit) {
  for (const std::uint64_t nbytes : {kStreamFrom - 1, kStreamFrom, kStreamFrom + 1}) {
    copies(copy_bytes, nbytes, 1, 5);
  }
}
