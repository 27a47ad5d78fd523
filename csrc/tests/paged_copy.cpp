// Copies in pages, of every alignment and around its limits: all bytes, and none beside them.
#include "../paged_copy.hpp"

#include <random>
#include <vector>

#include "check.hpp"

using namespace st2i;

namespace {

void copies(std::uint64_t nbytes, std::uint64_t to_at, std::uint64_t from_at) {
  std::mt19937_64 random(nbytes + 64 * to_at + from_at);
  std::vector<char> from(nbytes + from_at + 8), to(nbytes + to_at + 64, 'x');
  for (std::uint64_t i = 0; i + 8 <= from.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(from.data() + i, &word, 8);
  }
  paged_copy(to.data() + to_at, from.data() + from_at, nbytes);
  CHECK(std::memcmp(to.data() + to_at, from.data() + from_at, nbytes) == 0);
  for (std::uint64_t i = 0; i < to_at; ++i) CHECK(to[i] == 'x');
  for (std::uint64_t i = to_at + nbytes; i < to.size(); ++i) CHECK(to[i] == 'x');
}

}  // namespace

TEST(paged_copies_of_every_alignment) {
  for (std::uint64_t to_at = 0; to_at < 64; to_at += 5) {
    for (std::uint64_t from_at = 0; from_at < 64; from_at += 7) copies(kPagedFrom + 100, to_at, from_at);
  }
}

TEST(paged_copies_around_whole_groups_of_pages) {
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::uint64_t{1}, kPagedFrom - 1, kPagedFrom,
                                     kPagedFrom + 1, kPagedFrom + 16383, kPagedFrom + 16384}) {
    copies(nbytes, 0, 0);
    copies(nbytes, 1, 8);
  }
}
