// A directory of segment files, written by one process and mapped by any number of
// others.
#pragma once

#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstring>
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
// of these. A file that a generation no longer needs stays for OLDER_GENERATIONS more;
// one that none has had goes at once.
//
//   directory            lists
//   segments-01          texts of problems 7 and 8
//   segments-02          newer texts of problem 7
//   whole-01             generation 1: problems 7 and 8 in segments-01
//   manifest-02          what generation 2 changed: problem 7 in segments-01 and -02
//   manifest             the same as whole-01
class Store {
 public:
  using Files = std::map<uint64_t, std::shared_ptr<SegmentFile>>;  // by number
  // By problem, its segments, oldest first.
  using Histories = std::unordered_map<uint64_t, std::vector<Segment>>;
  // Problems, each with its segments, or with nullptr.
  using Table = std::vector<std::pair<uint64_t, const Segment*>>;
  struct Generation {
    FileHeader header;  // its checksum is the generation's identity
    // Whether problems that are not in `histories` have no history, else what they had.
    bool whole = true;
    Files files;
    Histories histories;
  };

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
      } catch (const std::filesystem::filesystem_error& e) {
        // A newer generation may have been published meanwhile.
        const bool gone = e.code().value() == ENOENT;
        if (generation || attempts == 1 || !gone || !exists()) throw;
      }
    }
  }

  // Goes on from a generation whose histories are in use.
  void keep(Generation& generation) {
    files_ = std::move(generation.files);
    header_ = generation.header;
    for (auto it = files_.begin(); it != files_.end();)
      it = it->second.use_count() == 1 ? files_.erase(it) : std::next(it);
  }

  // Takes over the directory as the last writer left it; called by the process that
  // will write.
  void take_over() {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string file = entry.path().filename();
      uint64_t number = 0;
      if (entry.path().extension() == ".tmp") {
        std::filesystem::remove(entry.path());
      } else if (std::sscanf(file.c_str(), "segments-%" SCNx64, &number) == 1) {
        next_number_ = std::max(next_number_, number + 1);
        if (!files_.count(number)) unneeded_since_[number] = generation();
      } else if (std::sscanf(file.c_str(), "manifest-%" SCNx64, &number) == 1) {
        manifests_.insert(number);
      } else if (std::sscanf(file.c_str(), "whole-%" SCNx64, &number) == 1) {
        wholes_.insert(number);
      }
    }
    first_unpublished_ = next_number_;
  }

  // Writes segments to a new file, and replaces them by what is mapped of it. `header`
  // has the newest version.
  void write(const std::vector<std::pair<uint64_t, Segment*>>& segments,
             FileHeader header) {
    header.number = next_number_;
    ++next_number_;
    const Table table(segments.begin(), segments.end());
    const std::string target = path(name("segments", header.number));
    write_segments(target, false, header, table);
    unneeded_since_[header.number] = generation();  // if it can't be mapped
    const auto file = std::make_shared<SegmentFile>(target, true, true);
    unneeded_since_.erase(header.number);
    for (size_t i = 0; i < segments.size(); ++i) {
      Segment& segment = *segments[i].second;
      if (segment.file) segment.file->used_bytes -= segment.nbytes();
      segment = SegmentFile::segment(file, i);
      file->used_bytes += segment.nbytes();
    }
    files_[header.number] = file;
    for (auto it = files_.lower_bound(first_unpublished_); it != files_.end();) {
      const bool stays = it->second->used_bytes;
      if (!stays) std::filesystem::remove(path(name("segments", it->first)));
      it = stays ? std::next(it) : files_.erase(it);
    }
  }

  // Publishes the next generation: `changed` has what is new in it, `all()` all of its
  // `num_segments` segments. A complete manifest is written when it costs no more than
  // those of the changes since the last one did.
  template <class All>
  void publish(const Table& changed, uint64_t num_segments, All&& all,
               FileHeader header) {
    header.number = generation() + 1;
    header = write_manifest({name("manifest", header.number)}, kManifestMagic,
                            header_.checksum, changed, header);
    header_ = header;
    first_unpublished_ = next_number_;
    manifests_.insert(header.number);
    changed_since_whole_ += changed.size();
    const uint64_t cheap = tuning::WHOLE_SEGMENTS + changed_since_whole_;
    if (wholes_.empty() || num_segments <= cheap) {
      const std::vector<std::string> targets{name("whole", header.number), "manifest"};
      write_manifest(targets, kWholeMagic, header.checksum, all(), header);
      wholes_.insert(header.number);
      changed_since_whole_ = 0;
    }
    for (auto it = files_.begin(); it != files_.end();) {
      const bool stays = it->second->used_bytes;
      if (!stays) unneeded_since_[it->first] = header.number;
      it = stays ? std::next(it) : files_.erase(it);
    }
    remove_old();
  }

 private:
  // A manifest's table: a line of the generation, a line of each file, and then a line
  // of each segment, those of one problem after each other:
  //
  //   identity of the generation before (in a complete one: of itself)   0      0
  //   number of a file                          bytes    checksum of its header
  //   problem                  which of the files (kGone: none)     entry in it
  struct IdentityLine {
    uint64_t identity;
    uint64_t unused[2] = {0, 0};
  };
  struct FileLine {
    uint64_t number;
    uint64_t bytes;
    uint64_t checksum;
  };
  struct SegmentLine {
    uint64_t problem;
    uint64_t file;
    uint64_t entry;
  };
  static constexpr uint64_t kGone = UINT64_MAX;
  using Line = std::array<uint64_t, 3>;
  static_assert(sizeof(Line) == sizeof(IdentityLine) &&
                    sizeof(Line) == sizeof(FileLine) &&
                    sizeof(Line) == sizeof(SegmentLine),
                "the layout of files");
  struct Manifest {
    FileHeader header;
    uint64_t identity;
    std::vector<FileLine> files;
    std::vector<SegmentLine> segments;
  };
  // Where a segment lies. `checksum`: of its file's header.
  struct Place {
    uint64_t file;
    uint64_t checksum;
    uint64_t entry;
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
    Manifest found{read_header<Line>(bytes, path, magic), 0, {}, {}};
    const uint64_t num_lines = found.header.count;
    const uint64_t num_files = found.header.extra;
    if (num_lines < 1 + num_files)
      throw FileError(path, "its table contradicts itself");
    const auto* const table =
        reinterpret_cast<const Line*>(bytes.data() + sizeof found.header);
    const auto* const files = reinterpret_cast<const FileLine*>(table + 1);
    const auto* const segments =
        reinterpret_cast<const SegmentLine*>(table + 1 + num_files);
    found.identity = reinterpret_cast<const IdentityLine*>(table)->identity;
    found.files.assign(files, files + num_files);
    found.segments.assign(segments, segments + (num_lines - 1 - num_files));
    return found;
  }

  // Adds where a manifest's problems have their segments, in place of what is known of
  // these problems.
  static void collect(const Manifest& manifest, const std::string& path,
                      Places& places) {
    const SegmentLine* previous = nullptr;
    for (const SegmentLine& line : manifest.segments) {
      auto& of_problem = places[line.problem];
      if (!previous || line.problem != previous->problem) of_problem.clear();
      previous = &line;
      if (line.file == kGone) continue;
      if (line.file >= manifest.files.size())
        throw FileError(path, "its table contradicts itself");
      const FileLine& file = manifest.files[line.file];
      of_problem.push_back({file.number, file.checksum, line.entry});
    }
  }

  // Reads the changes after the generation of `header`, up to `last` (0: all); returns
  // whether they are there.
  bool follow(FileHeader& header, uint64_t last, Places& places) const {
    while (header.number != last) {
      const std::string next = path(name("manifest", header.number + 1));
      if (!std::filesystem::exists(next)) return !last;
      const Manifest manifest = open(next, kManifestMagic);
      if (manifest.identity != header.checksum) return false;
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
    uint64_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string file = entry.path().filename();
      uint64_t number = 0;
      if (std::sscanf(file.c_str(), "whole-%" SCNx64, &number) != 1) continue;
      if (number <= last) found = std::max(found, number);
    }
    return path(name("whole", found));
  }

  Generation read_once(uint64_t generation) const {
    Generation out{header_, false, files_, {}};
    Places places;
    const bool not_older =
        this->generation() && (!generation || generation >= this->generation());
    const bool followed =
        not_older && current() && follow(out.header, generation, places);
    if (!followed) {
      const std::string file = whole(generation);
      const Manifest all = open(file, kWholeMagic);
      places.clear();
      collect(all, file, places);
      out.header = all.header;
      out.header.checksum = all.identity;
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
    std::vector<Line> lines;
    const auto add = [&lines](const auto& line) {
      Line bytes;
      std::memcpy(&bytes, &line, sizeof bytes);
      lines.push_back(bytes);
    };
    add(IdentityLine{identity});
    std::unordered_map<const SegmentFile*, uint64_t> order;
    for (const auto& [problem, segment] : table) {
      if (!segment || !order.emplace(segment->file, order.size()).second) continue;
      const FileHeader& file = segment->file->header();
      add(FileLine{file.number, file.bytes, file.checksum});
    }
    header.extra = order.size();
    for (const auto& [problem, segment] : table) {
      if (segment)
        add(SegmentLine{problem, order[segment->file], segment->entry});
      else
        add(SegmentLine{problem, kGone, 0});
    }
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
    for (auto it = unneeded_since_.begin(); it != unneeded_since_.end();) {
      const bool stays = it->second + tuning::OLDER_GENERATIONS > generation();
      if (!stays) std::filesystem::remove(path(name("segments", it->first)));
      it = stays ? std::next(it) : unneeded_since_.erase(it);
    }
    // The complete manifest from which the oldest generation that stays can be read.
    uint64_t oldest = 0;
    for (uint64_t number : wholes_)
      if (number + tuning::OLDER_GENERATIONS <= generation()) oldest = number;
    const auto remove_before_oldest = [&](const char* kind,
                                          std::set<uint64_t>& numbers) {
      while (!numbers.empty() && *numbers.begin() < oldest) {
        std::filesystem::remove(path(name(kind, *numbers.begin())));
        numbers.erase(numbers.begin());
      }
    };
    remove_before_oldest("manifest", manifests_);
    remove_before_oldest("whole", wholes_);
  }

  std::string directory_;
  FileHeader header_;
  Files files_;
  // By number of a file, the first generation that does not need it.
  std::map<uint64_t, uint64_t> unneeded_since_;
  std::set<uint64_t> manifests_;
  std::set<uint64_t> wholes_;
  uint64_t changed_since_whole_ = 0;  // segments in manifests since the last whole one
  uint64_t next_number_ = 1;  // of the next file
  uint64_t first_unpublished_ = 1;  // of the first file that no generation has
};

}  // namespace das
