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

TEST(streamed_copies_of_every_alignment) {
  for (std::uint64_t nbytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 1000, 16384 + 100}) {
    for (std::uint64_t to_at = 0; to_at < 64; to_at += 3) {
      for (std::uint64_t from_at = 0; from_at < 64; from_at += 7) {
        copies(stream_copy, nbytes, to_at, from_at);
      }
    }
  }
}

TEST(streamed_copies_around_whole_groups_of_pages) {
  for (const std::uint64_t nbytes : {16383, 16384, 16385, 32767, 32768, 32769, 3 * 16384}) {
    copies(stream_copy, nbytes, 0, 0);
    copies(stream_copy, nbytes, 1, 8);
  }
}

TEST(copies_on_both_sides_of_the_limits) {
  const auto cold = [](char *to, const char *from, std::uint64_t nbytes) {
    copy_bytes(to, from, nbytes, kColdStreamFrom);
  };
  for (const std::uint64_t off : {0, 1, 2}) {
    copies([](char *to, const char *from, std::uint64_t n) { copy_bytes(to, from, n); },
           kStreamFrom - 1 + off, 1, 5);
    copies(cold, kColdStreamFrom - 1 + off, 1, 5);
  }
}
