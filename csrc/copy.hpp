// Copying bytes once, of any size.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace st2i {

// From here on the C library's copy is slower than stores that pass the caches by, even when the copy is
// read right afterwards: ordinary stores first fetch every line that they overwrite. Measured, bytes.
inline constexpr std::uint64_t kStreamFrom = 8 << 20;

#ifdef __SSE2__
inline void stream_copy(char *to, const char *from, std::uint64_t nbytes) {
  constexpr std::uint64_t kLine = 64;
  const std::uint64_t ahead = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::uint64_t head = ahead < nbytes ? ahead : nbytes;
  std::memcpy(to, from, head);
  std::uint64_t done = head;
  for (; nbytes - done >= kLine; done += kLine) {
    const auto *source = reinterpret_cast<const __m128i *>(from + done);
    auto *line = reinterpret_cast<__m128i *>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                  c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  _mm_sfence();  // streamed stores are ordered by nothing else
  std::memcpy(to + done, from + done, nbytes - done);
}
#endif

inline void copy_bytes(char *to, const char *from, std::uint64_t nbytes) {
#ifdef __SSE2__
  if (nbytes >= kStreamFrom) return stream_copy(to, from, nbytes);
#endif
  std::memcpy(to, from, nbytes);
}

}  // namespace st2i
