// A checked binary file: header {magic, format version, bytes of the body, checksum of the body}, then the body.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace das {

struct FileError : std::runtime_error {  // the file is not what it should be; I/O failures are std::system_error
  using std::runtime_error::runtime_error;
};

struct FileHeader {
  uint64_t magic = 0x3158444e49534144;  // "DASINDX1" on a little-endian machine
  uint64_t format = 1;
  uint64_t bytes = 0;
  uint64_t checksum = 0xcbf29ce484222325;

  // Any change within one 8-byte word changes the result: every step is a bijection of the word.
  void cover(const void* data, size_t count) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < count; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, p + i, count - i < 8 ? count - i : 8);
      checksum = (checksum ^ word) * 0x9fb21c651e98df25ull;
      checksum ^= checksum >> 32;
    }
    bytes += count;
  }
};

class File {
 public:
  File(const std::string& path, const char* mode) : path_(path), file_(std::fopen(path.c_str(), mode), &std::fclose) {
    if (!file_) fail();
  }

  void write(const void* data, size_t count) {
    if (count && std::fwrite(data, 1, count, file_.get()) != count) fail();
  }
  void read(void* data, size_t count) {
    if (count && std::fread(data, 1, count, file_.get()) != count) throw FileError("it ends too early");
  }
  void seek(long offset, int whence = SEEK_SET) {
    if (std::fseek(file_.get(), offset, whence)) fail();
  }
  uint64_t size() {
    seek(0, SEEK_END);
    const long end = std::ftell(file_.get());
    seek(0);
    return static_cast<uint64_t>(end);
  }
  void flush() {
    if (std::fflush(file_.get())) fail();
  }

 private:
  [[noreturn]] void fail() const { throw std::system_error(errno, std::generic_category(), path_); }

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

class Writer {
 public:
  explicit Writer(const std::string& path) : file_(path, "wb") { file_.write(&header_, sizeof header_); }

  template <class T>
  void value(const T& v) {
    put(&v, sizeof v);
  }
  template <class T>
  void array(const std::vector<T>& v) {
    value<uint64_t>(v.size());
    put(v.data(), v.size() * sizeof(T));
  }
  void finish() {
    file_.seek(0);
    file_.write(&header_, sizeof header_);
    file_.flush();
  }

 private:
  void put(const void* data, size_t count) {
    header_.cover(data, count);
    file_.write(data, count);
  }

  FileHeader header_;
  File file_;
};

class Reader {
 public:
  explicit Reader(const std::string& path) : file_(path, "rb") {
    const FileHeader ours;
    const uint64_t size = file_.size();
    if (size < sizeof found_) throw FileError("it is too short for a header");
    file_.read(&found_, sizeof found_);
    if (found_.magic != ours.magic) throw FileError("it is not a suffix index file");
    if (found_.format != ours.format)
      throw FileError("its format version is " + std::to_string(found_.format) + ", this program reads " +
                      std::to_string(ours.format));
    if (found_.bytes != size - sizeof found_)
      throw FileError("it has " + std::to_string(size) + " bytes, its header says " +
                      std::to_string(found_.bytes + sizeof found_));
  }

  template <class T>
  T value() {
    T v;
    get(&v, sizeof v);
    return v;
  }
  template <class T>
  std::vector<T> array() {
    const auto count = value<uint64_t>();
    if (count > (found_.bytes - seen_.bytes) / sizeof(T)) throw FileError("an array reaches beyond its end");
    std::vector<T> v(count);
    get(v.data(), count * sizeof(T));
    return v;
  }
  void finish() const {
    if (seen_.bytes != found_.bytes || seen_.checksum != found_.checksum) throw FileError("its checksum is wrong");
  }

 private:
  void get(void* data, size_t count) {
    if (count > found_.bytes - seen_.bytes) throw FileError("it ends too early");
    file_.read(data, count);
    seen_.cover(data, count);
  }

  FileHeader found_, seen_;
  File file_;
};

}  // namespace das
