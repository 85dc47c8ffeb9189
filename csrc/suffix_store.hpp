// A directory of segment files, written by one process and mapped by any number of
// others.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "suffix_file.hpp"

namespace das {

// Files never change; nobody but their user can read them. `manifest-N` lists what
// generation N changed: problems with all their segments, and the files that these lie
// in. `whole-N` lists a generation completely, now and then; `manifest` is the newest
// of these. A file that a generation no longer needs stays for kKept more; one that
// none has had goes at once.
class Store {
 public:
  using Files = std::map<uint64_t, std::shared_ptr<SegmentFile>>;
  using Histories =
      std::unordered_map<uint64_t, std::vector<Segment>>;  // by problem, oldest first
  using Table =
      std::vector<std::pair<uint64_t, const Segment*>>;  // problems, each with its
                                                         // segments, or with nullptr
  struct Generation {
    FileHeader header;  // its checksum is the generation's identity
    bool whole = true;  // whether problems that are not in `histories` have no history,
                        // else what they had
    Files files;
    Histories histories;
  };
  static constexpr uint64_t kKept = 2;  // older generations that can still be mapped

  explicit Store(std::string directory) : directory_(std::move(directory)) {}

  bool exists() const { return std::filesystem::exists(path("manifest")); }
  uint64_t generation() const { return header_.number; }
  const Files& files() const { return files_; }
  // Bytes of the files.
  uint64_t file_bytes() const {
    uint64_t sum = 0;
    for (const auto& [number, file] : files_) sum += file->header().bytes;
    return sum;
  }

  // Maps a generation; 0: the newest. What the generation that was given to `keep` has
  // is not read again.
  Generation read(uint64_t generation) const {
    for (int attempts = 8;; --attempts) {
      try {
        return read_once(generation);
      } catch (const std::filesystem::filesystem_error&
                   e) {  // a newer generation may have been published meanwhile
        if (generation || attempts == 1 || e.code().value() != ENOENT || !exists())
          throw;
      }
    }
  }

  // Goes on from a generation whose histories are in use.
  void keep(Generation& generation) {
    files_ = std::move(generation.files), header_ = generation.header;
    for (auto it = files_.begin(); it != files_.end();)
      it = it->second.use_count() == 1 ? files_.erase(it) : std::next(it);
  }

  // Takes over the directory as the last writer left it; called by the process that
  // will write.
  void take_over() {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string file = entry.path().filename();
      uint64_t number = 0;
      if (entry.path().extension() == ".tmp")
        std::filesystem::remove(entry.path());
      else if (std::sscanf(file.c_str(), "segments-%" SCNx64, &number) == 1) {
        next_ = std::max(next_, number + 1);
        if (!files_.count(number)) dead_[number] = generation();
      } else if (std::sscanf(file.c_str(), "manifest-%" SCNx64, &number) == 1) {
        manifests_.insert(number);
      } else if (std::sscanf(file.c_str(), "whole-%" SCNx64, &number) == 1) {
        wholes_.insert(number);
      }
    }
    unpublished_ = next_;
  }

  // Writes segments to a new file, and replaces them by what is mapped of it. `header`
  // has the newest version.
  void write(const std::vector<std::pair<uint64_t, Segment*>>& segments,
             FileHeader header) {
    header.number = next_++;
    const Table table(segments.begin(), segments.end());
    const std::string target = path(name("segments", header.number));
    write_segments(target, false, header, table);
    dead_[header.number] = generation();  // if it can't be mapped
    const auto file = std::make_shared<SegmentFile>(target, true, true);
    dead_.erase(header.number);
    for (size_t i = 0; i < segments.size(); ++i) {
      Segment& segment = *segments[i].second;
      if (segment.file) segment.file->alive -= segment.nbytes();
      segment = SegmentFile::segment(file, i);
      file->alive += segment.nbytes();
    }
    files_[header.number] = file;
    for (auto it = files_.lower_bound(unpublished_); it != files_.end();) {
      const bool stays = it->second->alive;
      if (!stays) std::filesystem::remove(path(name("segments", it->first)));
      it = stays ? std::next(it) : files_.erase(it);
    }
  }

  // Publishes the next generation: `changed` has what is new in it, `all()` everything.
  // A complete manifest is written when it costs no more than those of the changes
  // since the last one did.
  template <class All>
  void publish(const Table& changed, uint64_t count, All&& all, FileHeader header) {
    header.number = generation() + 1;
    header = write_manifest({name("manifest", header.number)}, kManifestMagic,
                            header_.checksum, changed, header);
    header_ = header, unpublished_ = next_;
    manifests_.insert(header.number);
    since_ += changed.size();
    if (wholes_.empty() || count <= kSmall + since_) {
      const std::vector<std::string> targets{name("whole", header.number), "manifest"};
      write_manifest(targets, kWholeMagic, header.checksum, all(), header);
      wholes_.insert(header.number), since_ = 0;
    }
    for (auto it = files_.begin(); it != files_.end();) {
      const bool stays = it->second->alive;
      if (!stays) dead_[it->first] = header.number;
      it = stays ? std::next(it) : files_.erase(it);
    }
    remove_old();
  }

 private:
  static constexpr uint64_t kSmall =
      1024;  // segments that a complete manifest may always have
  static constexpr uint64_t kGone = UINT64_MAX;
  // Of a manifest's table: the identity of the generation before (in a complete one: of
  // itself); then files: number, bytes, checksum of the header; then segments: problem,
  // which of the files (kGone: it has none), entry in it.
  struct Line {
    uint64_t first, second, third;
  };
  struct Manifest {
    FileHeader header;
    std::vector<Line> lines;
  };
  struct Place {
    uint64_t file, checksum, entry;
  };
  using Places = std::unordered_map<uint64_t, std::vector<Place>>;  // by problem

  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  static std::string name(const char* kind, uint64_t number) {
    char name[40];
    std::snprintf(name, sizeof name, "%s-%016" PRIx64, kind, number);
    return name;
  }

  static Manifest open(const std::string& path, uint64_t magic) {
    const Bytes bytes(path, false, true);
    Manifest found{read_header<Line>(bytes, path, magic), {}};
    if (found.header.count < 1 + found.header.extra)
      throw FileError(path, "its table contradicts itself");
    const auto* lines =
        reinterpret_cast<const Line*>(bytes.data() + sizeof found.header);
    found.lines.assign(lines, lines + found.header.count);
    return found;
  }

  // Takes in where a manifest's problems have their segments.
  static void collect(const Manifest& manifest, const std::string& path,
                      Places& places) {
    const auto& lines = manifest.lines;
    const uint64_t files = manifest.header.extra;
    for (size_t i = 1 + files; i < lines.size(); ++i) {
      auto& list = places[lines[i].first];
      if (i == 1 + files || lines[i].first != lines[i - 1].first) list.clear();
      if (lines[i].second == kGone) continue;
      if (lines[i].second >= files)
        throw FileError(path, "its table contradicts itself");
      const Line& file = lines[1 + lines[i].second];
      list.push_back({file.first, file.third, lines[i].third});
    }
  }

  // Reads the changes after the generation of `header`, up to `last` (0: all); returns
  // whether they are there.
  bool follow(FileHeader& header, uint64_t last, Places& places) const {
    while (header.number != last) {
      const std::string next = path(name("manifest", header.number + 1));
      if (!std::filesystem::exists(next)) return !last;
      const Manifest manifest = open(next, kManifestMagic);
      if (manifest.lines[0].first != header.checksum) return false;
      collect(manifest, next, places);
      header = manifest.header;
    }
    return true;
  }

  // Whether the generation that is kept is still one of the directory's.
  bool current() const {
    const std::string own = path(name("manifest", generation()));
    return std::filesystem::exists(own) &&
           open(own, kManifestMagic).header.checksum == header_.checksum;
  }

  // The newest complete manifest of a generation up to `last`; 0: of all.
  std::string whole(uint64_t last) const {
    if (!last) return path("manifest");
    uint64_t found = 0, number = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory_))
      if (std::sscanf(entry.path().filename().c_str(), "whole-%" SCNx64, &number) ==
              1 &&
          number <= last)
        found = std::max(found, number);
    return path(name("whole", found));
  }

  Generation read_once(uint64_t generation) const {
    Generation out{header_, false, files_, {}};
    Places places;
    const bool ahead =
        this->generation() && (!generation || generation >= this->generation());
    if (!ahead || !current() || !follow(out.header, generation, places)) {
      const std::string file = whole(generation);
      const Manifest all = open(file, kWholeMagic);
      places.clear(), collect(all, file, places);
      out.header = all.header, out.header.checksum = all.lines[0].first,
      out.whole = true;
      if (!follow(out.header, generation, places)) {
        errno = ENOENT;
        fail(path(name("manifest", generation ? generation : out.header.number + 1)));
      }
    }
    for (const auto& [problem, list] : places) {
      auto& segments = out.histories[problem];
      for (const Place& place : list) {
        auto& file = out.files[place.file];
        const std::string named = path(name("segments", place.file));
        if (!file || file->header().checksum != place.checksum)
          file = std::make_shared<SegmentFile>(named, true, true);
        if (file->header().checksum != place.checksum)
          throw FileError(named, "it is not the file that the manifest names");
        if (place.entry >= file->header().count ||
            file->entry(place.entry).problem != problem)
          throw FileError(path("manifest"), "its table contradicts itself");
        segments.push_back(SegmentFile::segment(file, place.entry));
      }
    }
    return out;
  }

  FileHeader write_manifest(const std::vector<std::string>& targets, uint64_t magic,
                            uint64_t identity, const Table& table,
                            FileHeader header) const {
    std::unordered_map<const SegmentFile*, uint64_t> order;
    std::vector<Line> lines{{identity, 0, 0}};
    for (const auto& [problem, s] : table)
      if (s && order.emplace(s->file, order.size()).second)
        lines.push_back({s->file->header().number, s->file->header().bytes,
                         s->file->header().checksum});
    header.extra = order.size();
    for (const auto& [problem, s] : table)
      lines.push_back(s ? Line{problem, order[s->file], s->entry}
                        : Line{problem, kGone, 0});
    header.magic = magic;
    seal_header(header, lines, 0);
    for (const std::string& target : targets)
      write_file(path(target), false, [&](auto&& put) {
        put(&header, sizeof header);
        put(lines.data(), lines.size() * sizeof lines[0]);
      });
    return header;
  }

  void remove_old() {
    for (auto it = dead_.begin(); it != dead_.end();) {
      const bool stays = it->second + kKept > generation();
      if (!stays) std::filesystem::remove(path(name("segments", it->first)));
      it = stays ? std::next(it) : dead_.erase(it);
    }
    uint64_t oldest = 0;  // the complete manifest from which the oldest generation that
                          // is kept can be read
    for (uint64_t number : wholes_)
      if (number + kKept <= generation()) oldest = number;
    const auto remove = [&](const char* kind, std::set<uint64_t>& numbers) {
      for (; !numbers.empty() && *numbers.begin() < oldest;
           numbers.erase(numbers.begin()))
        std::filesystem::remove(path(name(kind, *numbers.begin())));
    };
    remove("manifest", manifests_), remove("whole", wholes_);
  }

  std::string directory_;
  FileHeader header_;
  Files files_;
  std::map<uint64_t, uint64_t>
      dead_;  // file number: the first generation that does not need it
  std::set<uint64_t> manifests_, wholes_;
  uint64_t since_ = 0;  // segments in the manifests since the last complete one
  uint64_t next_ = 1,
           unpublished_ =
               1;  // numbers of the next file, and of the first that no generation has
};

}  // namespace das
