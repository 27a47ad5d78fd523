// The shared memory of a heap, as its owner makes it and as other processes map it:
//   header page | signal words | one generation per granule | payload
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "granule.hpp"
#include "memory.hpp"

namespace st2i {

inline constexpr std::uint64_t kWordBytes = 64 * 1024;
inline constexpr std::uint32_t kWords = kWordBytes / 4;
inline constexpr std::size_t kLongestName = 200;

struct Header {
  static constexpr std::uint64_t kMagic = 0x616e657261693274;  // "t2iarena"
  static constexpr std::uint32_t kVersion = 1;

  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t granule;
  std::uint64_t payload;  // bytes
  std::uint64_t total;    // bytes of the whole segment
};

using Word = std::atomic<std::uint32_t>;
using Generation = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && Generation::is_always_lock_free,
              "shared between processes");

class Segment {
 public:
  // A new one of `payload` bytes, a multiple of kGranule. All zero; no memory is taken yet.
  static Segment create(const std::string &name, std::uint64_t payload) {
    check_name(name);
    Segment made;
    made.place(payload);
    made.fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd_ < 0) throw_errno("cannot create shared memory " + name);
    if (ftruncate(made.fd_, static_cast<off_t>(made.total_)) != 0) {
      throw_errno("cannot give shared memory " + name + " " + std::to_string(made.total_) + " bytes");
    }
    // Nobody's truncation can make a reader fault.
    if (fcntl(made.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_errno("cannot seal shared memory " + name);
    }
    made.map(PROT_READ | PROT_WRITE);
    *made.header() = {Header::kMagic, Header::kVersion, static_cast<std::uint32_t>(kGranule), payload,
                      made.total_};
    return made;
  }

  // That of another process, for reading. system_error: it is not there, not allowed, or another.
  static Segment open(int pid, int fd, const std::string &name) {
    check_name(name);
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    // Looked at before it is opened (opening a device may do something), and after (no race).
    expect_name(path, name);
    Segment found;
    found.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (found.fd_ < 0) throw_errno("cannot open shared memory " + path);
    expect_name("/proc/self/fd/" + std::to_string(found.fd_), name);
    const int seals = fcntl(found.fd_, F_GET_SEALS);
    constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
    if (seals < 0 || (seals & kNeeded) != kNeeded) refuse(path, "is not sealed against resizing");
    Header header{};
    if (pread(found.fd_, &header, sizeof header, 0) != sizeof header ||
        header.magic != Header::kMagic) {
      refuse(path, "is not an arena");
    }
    if (header.version != Header::kVersion || header.granule != kGranule) {
      refuse(path, "is an arena of version " + std::to_string(header.version) + ", not " +
                       std::to_string(Header::kVersion));
    }
    struct stat status{};
    if (fstat(found.fd_, &status) != 0) throw_errno("cannot look at shared memory " + path);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (header.payload == 0 || header.payload % kGranule || header.payload > size ||
        (found.place(header.payload), found.total_ != size || header.total != size)) {
      refuse(path, "says a size that is not its own");
    }
    found.map(PROT_READ);
    close(std::exchange(found.fd_, -1));  // the mapping is enough
    return found;
  }

  Segment(const Segment &) = delete;
  Segment &operator=(const Segment &) = delete;
  Segment(Segment &&other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        start_(std::exchange(other.start_, nullptr)),
        total_(other.total_),
        payload_bytes_(other.payload_bytes_),
        payload_at_(other.payload_at_) {}
  Segment &operator=(Segment &&) = delete;

  ~Segment() {
    if (start_) munmap(start_, total_);
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  std::uint64_t payload_bytes() const { return payload_bytes_; }
  char *payload() const { return start_ + payload_at_; }

  // Maps bytes of the payload at another address, too, over whatever is mapped there; all three are
  // multiples of the page size. The owner's only.
  void map_again(char *at, std::uint64_t offset, std::uint64_t nbytes) const {
    if (mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
             static_cast<off_t>(payload_at_ + offset)) == MAP_FAILED) {
      throw_errno("cannot map " + std::to_string(nbytes) + " bytes a second time");
    }
  }

  Word &word(std::uint32_t index) const {
    return reinterpret_cast<Word *>(start_ + page_size())[index];
  }

  // Of the block that starts at payload offset `offset`; 0 where none starts.
  Generation &generation(std::uint64_t offset) const {
    return reinterpret_cast<Generation *>(start_ + page_size() + kWordBytes)[offset / kGranule];
  }

 private:
  Segment() = default;

  static void check_name(const std::string &name) {
    if (name.empty() || name.size() > kLongestName || name.find('\0') != std::string::npos) {
      throw std::invalid_argument("a heap's name has 1 to " + std::to_string(kLongestName) +
                                  " bytes without NUL; got " + std::to_string(name.size()));
    }
  }

  static void expect_name(const std::string &path, const std::string &name) {
    char target[kLongestName + 64];
    const ssize_t n = readlink(path.c_str(), target, sizeof target);
    if (n < 0) throw_errno("cannot find shared memory " + name + " at " + path);
    if (std::string(target, static_cast<std::size_t>(n)) != "/memfd:" + name + " (deleted)") {
      refuse(path, "is not shared memory " + name);
    }
  }

  [[noreturn]] static void refuse(const std::string &path, const std::string &why) {
    throw std::system_error(ESTALE, std::generic_category(), path + " " + why);
  }

  void place(std::uint64_t payload) {
    const std::uint64_t table = payload / kGranule * sizeof(Generation);
    payload_bytes_ = payload;
    payload_at_ = (page_size() + kWordBytes + table + kGranule - 1) / kGranule * kGranule;
    total_ = payload_at_ + payload;
  }

  void map(int protection) {
    void *at = mmap(nullptr, total_, protection, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) throw_errno("cannot map " + std::to_string(total_) + " bytes");
    start_ = static_cast<char *>(at);
  }

  Header *header() const { return reinterpret_cast<Header *>(start_); }

  int fd_ = -1;
  char *start_ = nullptr;
  std::uint64_t total_ = 0, payload_bytes_ = 0, payload_at_ = 0;
};

}  // namespace st2i
