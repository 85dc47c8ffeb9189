// A file of segments: header, table of contents, then each segment's bytes. It is
// mapped or read, and checked.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "suffix_segment.hpp"

namespace das {

// The contents of a file are wrong.
struct FileError : std::runtime_error {
  FileError(const std::string& path, const std::string& what)
      : std::runtime_error("suffix index file '" + path + "': " + what) {}
};

// Throws that a file can't be read or written; errno says why.
[[noreturn]] inline void fail(const std::string& path) {
  throw std::filesystem::filesystem_error(
      "", path, std::error_code(errno, std::generic_category()));
}

// Checksum of some bytes, eight 8-byte words at a time. Any change within one word
// changes the result.
inline uint64_t checksum(const void* data, size_t bytes) {
  std::array<uint64_t, 8> lanes;
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = 0xcbf29ce484222325 + i;
  const auto cover = [](uint64_t& sum, uint64_t word) {
    sum = (sum ^ word) * 0x9fb21c651e98df25;
    sum ^= sum >> 32;
  };
  uint64_t sum = bytes;
  const auto* p = static_cast<const unsigned char*>(data);
  for (; bytes >= sizeof lanes; p += sizeof lanes, bytes -= sizeof lanes) {
    std::array<uint64_t, 8> words;
    std::memcpy(words.data(), p, sizeof words);
    for (size_t i = 0; i < lanes.size(); ++i) cover(lanes[i], words[i]);
  }
  for (uint64_t lane : lanes) cover(sum, lane);
  std::array<uint64_t, 8> rest{};
  if (bytes) std::memcpy(rest.data(), p, bytes);
  for (uint64_t word : rest) cover(sum, word);
  return sum;
}

struct FileHeader {
  uint64_t magic = 0;
  uint64_t format = 3;
  uint64_t bytes = 0;     // of the whole file
  uint64_t depth = tuning::DEPTH_TOKENS;
  int64_t newest = 0;     // the newest version that was ever sealed
  uint64_t count = 0;     // of entries in the table
  uint64_t number = 0;    // of the file; of a manifest: its generation
  uint64_t extra = 0;  // manifest: files, which come before the segments in the table
  uint64_t table = 0;  // checksum of the table
  uint64_t checksum = 0;  // of all above

  uint64_t sum() const { return das::checksum(this, offsetof(FileHeader, checksum)); }
};
// Eight letters on a little-endian machine: "DASXSEG2", "DASXMAN3", "DASXALL3".
constexpr uint64_t kSegmentMagic = 0x3247455358534144;
constexpr uint64_t kManifestMagic = 0x334e414d58534144;
constexpr uint64_t kWholeMagic = 0x334c4c4158534144;

// Bytes of a file, mapped or, where `need` asks for them, read into memory: what lies
// on another machine is not mapped, because a read that fails there is an error, and
// not a signal. `own`: it must be this user's, and no link.
class Bytes {
 public:
  Bytes(std::string path, bool map, bool own) : path_(std::move(path)), mapped_(map) {
    // what is no file, such as a pipe, is not waited for
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (own ? O_NOFOLLOW : 0);
    file_.number = ::open(path_.c_str(), flags);
    if (file_.number < 0) fail(path_);
    struct stat status;
    if (fstat(file_.number, &status)) fail(path_);
    if (!S_ISREG(status.st_mode)) throw FileError(path_, "it is not a file");
    if (own && status.st_uid != geteuid())
      throw FileError(path_, "it is another user's");
    size_ = static_cast<size_t>(status.st_size);
    if (!size_) return;
    void* data = nullptr;
    if (map)
      data = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_.number, 0);
    else
      data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, kUnread, -1, 0);
    if (data == MAP_FAILED) fail(path_);
    data_ = static_cast<char*>(data);
    if (map) file_.close();
  }
  ~Bytes() {
    if (data_) munmap(data_, size_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const char* data() const { return data_; }
  size_t size() const { return size_; }

  // Makes sure that bytes at `from`, which the file has, can be used.
  void need(size_t from, size_t bytes) const {
    if (mapped_) return;
    const size_t end = from + bytes;
    for (size_t next = from; next < end;) {
      const auto offset = static_cast<off_t>(next);
      const ssize_t num_read = ::pread(file_.number, data_ + next, end - next, offset);
      if (num_read < 0 && errno == EINTR) continue;
      if (num_read < 0) fail(path_);
      if (!num_read) throw FileError(path_, "it became shorter while it was read");
      next += static_cast<size_t>(num_read);
    }
  }
  // Gives back the memory of bytes that were read.
  void forget(size_t from, size_t bytes) const {
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t begin = (from + page - 1) / page * page;
    const size_t end = (from + bytes) / page * page;
    if (!mapped_ && begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
  }

 private:
  // Memory that is taken where it is written.
  static constexpr int kUnread = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  struct File {
    int number = -1;
    void close() {
      if (number >= 0) ::close(number);
      number = -1;
    }
    ~File() { close(); }
  };

  std::string path_;
  bool mapped_;
  File file_;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Reads the header, and checks it and the table of `Entry` behind it; the other bytes
// are not read.
template <class Entry>
FileHeader read_header(const Bytes& bytes, const std::string& path, uint64_t magic) {
  FileHeader h;
  const FileHeader ours;
  if (bytes.size() < sizeof h) throw FileError(path, "it is too short for a header");
  bytes.need(0, sizeof h);
  std::memcpy(&h, bytes.data(), sizeof h);
  if (h.magic != magic) throw FileError(path, "it is not a file of a suffix index");
  if (h.format != ours.format)
    throw FileError(path, "its format version is " + std::to_string(h.format) +
                              ", this program reads " + std::to_string(ours.format));
  if (h.checksum != h.sum())
    throw FileError(path, "the checksum of its header is wrong");
  if (h.bytes != bytes.size())
    throw FileError(path, "it has " + std::to_string(bytes.size()) +
                              " bytes, its header says " + std::to_string(h.bytes));
  if (h.depth != tuning::DEPTH_TOKENS)
    throw FileError(path, "its depth is " + std::to_string(h.depth));
  if (h.count > (h.bytes - sizeof h) / sizeof(Entry) || h.extra > h.count)
    throw FileError(path, "its header contradicts itself");
  bytes.need(sizeof h, h.count * sizeof(Entry));
  if (h.table != checksum(bytes.data() + sizeof h, h.count * sizeof(Entry)))
    throw FileError(path, "the checksum of its table is wrong");
  return h;
}

// One file of segments.
class SegmentFile {
 public:
  struct Entry {
    uint64_t problem;
    uint64_t offset;  // of its bytes in the file
    uint64_t tokens, places, runs;
    uint64_t checksum;  // of its bytes

    Segment::Shape shape() const { return {tokens, places, runs}; }
  };

  SegmentFile(std::string path, bool map, bool own)
      : path_(std::move(path)), bytes_(path_, map, own) {
    header_ = read_header<Entry>(bytes_, path_, kSegmentMagic);
    uint64_t end = sizeof header_ + header_.count * sizeof(Entry);
    for (size_t i = 0; i < header_.count; ++i) {
      const Entry& e = entry(i);
      const bool sane = e.offset == end && e.runs && e.places && e.runs < e.tokens &&
                        e.places < e.tokens && e.tokens <= Segment::kCapacity;
      if (!sane || e.shape().bytes() > header_.bytes - end)
        throw FileError(path_, "its table contradicts itself");
      end += e.shape().bytes();
    }
    if (end != header_.bytes) throw FileError(path_, "its table contradicts itself");
    checked_ = std::make_unique<std::atomic<bool>[]>(header_.count);
  }

  // Bytes of its segments that a history uses; known to the process that writes.
  uint64_t used_bytes = 0;

  const std::string& path() const { return path_; }
  const FileHeader& header() const { return header_; }
  uint64_t body() const {
    return header_.bytes - sizeof header_ - header_.count * sizeof(Entry);
  }
  const Entry& entry(size_t i) const {
    return reinterpret_cast<const Entry*>(bytes_.data() + sizeof header_)[i];
  }

  // Returns a segment that keeps the file alive. Its bytes are not read before `check`.
  static Segment segment(const std::shared_ptr<SegmentFile>& file, size_t i) {
    const Entry& e = file->entry(i);
    Segment segment(file->bytes_.data() + e.offset, e.shape(), file);
    segment.file = file.get();
    segment.entry = i;
    return segment;
  }

  // Checks a segment's bytes, the first time only; throws FileError for a damaged one.
  void check(size_t i) {
    if (checked_[i]) return;
    const Entry& e = entry(i);
    const uint64_t num_bytes = e.shape().bytes();
    bytes_.need(e.offset, num_bytes);
    const char* const data = bytes_.data() + e.offset;
    if (e.checksum != checksum(data, num_bytes))
      throw FileError(
          path_, "the checksum of problem " + std::to_string(e.problem) + " is wrong");
    if (!Segment(data, e.shape(), nullptr).sound())
      throw FileError(path_, "the arrays of problem " + std::to_string(e.problem) +
                                 " contradict each other");
    checked_[i] = true;
  }
  // Gives back the memory of a segment that nobody uses.
  void forget(size_t i) {
    bytes_.forget(entry(i).offset, entry(i).shape().bytes());
    checked_[i] = false;
  }

 private:
  std::string path_;
  Bytes bytes_;
  FileHeader header_;
  std::unique_ptr<std::atomic<bool>[]> checked_;
};

inline void check(const Segment& segment) {
  if (segment.file) segment.file->check(segment.entry);
}

// Writes a file under a temporary name and renames it, so that other processes see all
// of it or nothing. `durable`: it is on the disk before that, with the permissions that
// the user gives new files; else only this user can read it.
template <class Write>
void write_file(const std::string& path, bool durable, Write&& write) {
  const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
  const auto fail = [&] {
    const int error = errno;
    std::remove(temporary.c_str());
    errno = error;
    das::fail(path);
  };
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC;
  const int descriptor = ::open(temporary.c_str(), flags, durable ? 0666 : 0600);
  std::FILE* file = descriptor < 0 ? nullptr : fdopen(descriptor, "wb");
  if (!file) fail();
  bool sound = true;
  write([&](const void* data, size_t bytes) {
    sound = sound && (!bytes || std::fwrite(data, 1, bytes, file) == bytes);
  });
  sound = sound && !std::fflush(file) && !(durable && fsync(descriptor));
  const int error = errno;
  sound = !std::fclose(file) && sound;
  if (!sound) {
    errno = error ? error : EIO;
    fail();
  }
  if (std::rename(temporary.c_str(), path.c_str())) fail();
}

template <class Entry>
void seal_header(FileHeader& header, const std::vector<Entry>& table, uint64_t body) {
  header.count = table.size();
  header.bytes = sizeof header + table.size() * sizeof(Entry) + body;
  header.table = checksum(table.data(), table.size() * sizeof(Entry));
  header.checksum = header.sum();
}

inline void write_segments(
    const std::string& path, bool durable, FileHeader header,
    const std::vector<std::pair<uint64_t, const Segment*>>& segments) {
  std::vector<SegmentFile::Entry> table;
  const uint64_t begin = sizeof header + segments.size() * sizeof(SegmentFile::Entry);
  uint64_t end = begin;
  for (const auto& [problem, s] : segments) {
    const auto shape = s->shape();
    table.push_back({problem, end, shape.tokens, shape.places, shape.runs,
                     checksum(s->bytes(), shape.bytes())});
    end += shape.bytes();
  }
  header.magic = kSegmentMagic;
  seal_header(header, table, end - begin);
  write_file(path, durable, [&](auto&& put) {
    put(&header, sizeof header);
    put(table.data(), table.size() * sizeof table[0]);
    for (const auto& [problem, s] : segments) put(s->bytes(), s->nbytes());
  });
}

}  // namespace das
