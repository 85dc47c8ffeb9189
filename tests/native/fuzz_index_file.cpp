// Fuzz target for the loaders of index files: any bytes are refused with FileError, or
// drafted from without a fault.
//
// With clang:
//
//   python csrc/tuning_header.py das_adapter/core/tuning.py build/native/tuning.hpp
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -DDAS_LIBFUZZER
//     -Icsrc -Ibuild/native tests/native/fuzz_index_file.cpp csrc/suffix_index.cpp
//
// Without: the main below damages sound files in a deterministic way, as often as its
// argument says.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "suffix_index.hpp"

namespace {

using namespace das;
namespace fs = std::filesystem;

const fs::path& folder() {
  static const fs::path path = [] {
    const auto p = fs::temp_directory_path() / ("das-fuzz-" + std::to_string(getpid()));
    fs::create_directories(p);
    return p;
  }();
  return path;
}

void write(const fs::path& path, const std::string& data) {
  std::ofstream(path, std::ios::binary) << data;
}
std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The checksums of a file made right, as far as its header and table let one find what
// they cover: so that what lies behind them is tried too.
template <class Entry>
std::string signed_(std::string data, bool bodies) {
  FileHeader h;
  if (data.size() < sizeof h) return data;
  std::memcpy(&h, data.data(), sizeof h);
  h.bytes = data.size();
  h.count = std::min<uint64_t>(h.count, (data.size() - sizeof h) / sizeof(Entry));
  for (uint64_t i = 0; bodies && i < h.count; ++i) {
    auto* e = reinterpret_cast<SegmentFile::Entry*>(&data[sizeof h]) + i;
    if (e->offset > data.size() ||
        std::max({e->tokens, e->places, e->runs}) > data.size())
      continue;
    if (e->shape().bytes() <= data.size() - e->offset)
      e->checksum = checksum(data.data() + e->offset, e->shape().bytes());
  }
  h.table = checksum(data.data() + sizeof h, h.count * sizeof(Entry));
  h.checksum = h.sum();
  std::memcpy(&data[0], &h, sizeof h);
  return data;
}

// Drafts, extends and rewrites with whatever was loaded.
void use(SuffixIndex& index) {
  const Token text[] = {1, 2, 3, 1, 2};
  std::vector<int64_t> handles, budgets;
  for (uint64_t problem = 0; problem < 4; ++problem) {
    handles.push_back(index.open(problem, text, 3, text, problem));
    budgets.push_back(6);
    index.extend(handles.back(), text, problem + 1);
  }
  index.draft(handles.data(), budgets.data(), handles.size(), 0);
}

template <class Function>
bool survives(Function&& function) {
  try {
    function();
    return true;
  } catch (const FileError&) {
    return false;
  }
}

// Uses bytes as a saved index; returns whether they are one.
bool is_index(const std::string& data) {
  const std::string path = folder() / "saved";
  write(path, data);
  return survives([&] {
    SuffixIndex index;
    index.absorb(path, {0, 1, 2, 3});
    use(index);
    const Token more[] = {1, 2, 3};
    index.add(1, more, 3, 9);
    index.seal(2, 0, UINT64_MAX);
    index.shrink(index.nbytes() - 1, UINT64_MAX);
    index.saving().write(folder() / "again");
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  is_index(bytes);
  is_index(signed_<SegmentFile::Entry>(bytes, true));
  return 0;
}

#ifndef DAS_LIBFUZZER
int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::mt19937_64 rng(7);
  const fs::path store = folder() / "store";
  fs::create_directories(store);
  {
    SuffixIndex index;
    index.attach(store, true);
    for (int version = 0; version < 3; ++version) {
      for (uint64_t problem = 0; problem < 3; ++problem) {
        std::vector<Token> text(40 + problem);
        for (Token& token : text) token = static_cast<Token>(rng() % 4);
        index.add(problem, text.data(), text.size(), version);
      }
      index.seal(8, 0, UINT64_MAX);
      index.publish(false);
    }
    index.saving().write(folder() / "sound");
  }
  const std::string sound = read(folder() / "sound");
  const std::string manifest = read(store / "manifest");
  int num_indexes = 0;
  const auto damage = [&](std::string data) {
    for (auto times = rng() % 3 + 1; times; --times) {
      const size_t at = rng() % data.size();
      const size_t word = at / 4 * 4;
      const uint32_t odd[] = {0,
                              1,
                              0xffffffff,
                              0x7fffffff,
                              static_cast<uint32_t>(rng()),
                              static_cast<uint32_t>(rng() % 64)};
      switch (rng() % 5) {
        case 0: data[at] = static_cast<char>(rng()); break;
        case 1: data[at] ^= static_cast<char>(1 << rng() % 8); break;
        case 2: data.resize(std::max<size_t>(at, 1)); break;
        case 3: data.insert(at, data.substr(rng() % data.size(), rng() % 64)); break;
        default:
          if (word + 4 <= data.size()) std::memcpy(&data[word], &odd[rng() % 6], 4);
      }
    }
    return data;
  };
  for (int i = 0; i < rounds; ++i) {
    const std::string damaged = damage(sound);
    if (damaged != sound && is_index(damaged)) {
      std::printf("a damaged file was taken for an index\n");
      return 1;
    }
    num_indexes += is_index(signed_<SegmentFile::Entry>(damaged, true));
    write(store / "manifest",
          i % 2 ? signed_<std::array<uint64_t, 3>>(damage(manifest), false)
                : damage(manifest));
    survives([&] {
      try {
        SuffixIndex index;
        index.attach(store, false);
        use(index);
      } catch (const fs::filesystem_error&) {  // it names a file that is not there
      }
    });
  }
  fs::remove_all(folder());
  std::printf("%d rounds, %d of the damaged files with right checksums were indexes\n",
              rounds, num_indexes);
  return num_indexes ? 0 : 1;
}
#endif
