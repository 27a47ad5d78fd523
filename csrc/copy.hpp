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
// What is in no cache and will not be read soon (weights from a file) gains earlier; below, the ends weigh
// more.
inline constexpr std::uint64_t kColdStreamFrom = 64 << 10;

// Four pages side by side, each fetched while the four before it are copied: a processor fetches ahead by
// itself only within a page. Measured: 10.5 GB/s where one page after the other gives 9, and memcpy 6.5 to
// 9.5.
inline void stream_copy(char *to, const char *from, std::uint64_t nbytes) {
  std::uint64_t done = 0;
#ifdef __SSE2__
  constexpr std::uint64_t kLine = 64, kPage = 4096, kGroup = 4 * kPage;
  if (nbytes >= kLine) {
    done = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    std::memcpy(to, from, done);
    for (; nbytes - done >= kGroup; done += kGroup) {
      for (std::uint64_t line = 0; line < kPage; line += kLine) {
        for (std::uint64_t page = 0; page < kGroup; page += kPage) {
          const char *source = from + done + page + line;
          // Beyond the end it does nothing: a fetch ahead cannot fault.
          _mm_prefetch(source + kGroup, _MM_HINT_T0);
          const auto *in = reinterpret_cast<const __m128i *>(source);
          auto *out = reinterpret_cast<__m128i *>(to + done + page + line);
          const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1),
                        c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
          _mm_stream_si128(out, a);
          _mm_stream_si128(out + 1, b);
          _mm_stream_si128(out + 2, c);
          _mm_stream_si128(out + 3, d);
        }
      }
    }
    _mm_sfence();  // streamed stores are ordered by nothing else
  }
#endif
  if (done < nbytes) std::memcpy(to + done, from + done, nbytes - done);
}

// stream_from: from so many bytes on with stores that pass the caches by.
inline void copy_bytes(char *to, const char *from, std::uint64_t nbytes,
                       std::uint64_t stream_from = kStreamFrom) {
  if (nbytes >= stream_from) return stream_copy(to, from, nbytes);
  std::memcpy(to, from, nbytes);
}

}  // namespace st2i
