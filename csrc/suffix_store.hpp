// A directory of segment files, written by one process and mapped by any number of others.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "suffix_file.hpp"

namespace das {

// Files never change; nobody but their user can read them. A manifest lists the files of one generation and which of
// their segments belong to it: `manifest` is the newest, `manifest-N` that of generation N. A file that a generation no
// longer needs stays for kKept more.
class Store {
 public:
  using Segments = std::vector<std::pair<uint64_t, Segment>>;  // by problem, each problem's oldest first
  using Files = std::map<uint64_t, std::shared_ptr<SegmentFile>>;
  struct Generation {
    FileHeader header;
    Files files;
    Segments segments;
  };
  static constexpr uint64_t kKept = 2;  // older generations that can still be mapped

  explicit Store(std::string directory) : directory_(std::move(directory)) {}

  bool exists() const { return std::filesystem::exists(path("manifest")); }
  uint64_t generation() const { return header_.number; }
  // Bytes of the generation's files.
  uint64_t file_bytes() const {
    uint64_t sum = 0;
    for (const auto& [number, file] : files_) sum += file->header().bytes;
    return sum;
  }

  // Maps a generation; 0: the newest. Files of the generation that was given to `keep` are not opened again.
  Generation read(uint64_t generation) const {
    for (int attempts = 8;; --attempts) {
      try {
        return read_once(path(generation ? name("manifest", generation) : "manifest"));
      } catch (const std::filesystem::filesystem_error& e) {  // a newer generation may have been published meanwhile
        if (generation || attempts == 1 || e.code().value() != ENOENT || !exists()) throw;
      }
    }
  }

  void keep(Generation& generation) { files_ = std::move(generation.files), header_ = generation.header; }

  // Takes over the directory as the last writer left it; called by the process that will write.
  void take_over() {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string file = entry.path().filename();
      uint64_t number = 0;
      if (entry.path().extension() == ".tmp")
        std::filesystem::remove(entry.path());
      else if (std::sscanf(file.c_str(), "segments-%" SCNx64, &number) == 1) {
        next_ = std::max(next_, number + 1);
        if (!files_.count(number)) dead_[number] = generation();
      }
    }
  }

  // Publishes the next generation. Segments that are in no file yet, or in a file of which more than a quarter is no
  // longer needed, are written to a new file, and then replaced by what is mapped of it. `header` has depth and newest
  // version.
  void publish(const std::vector<std::pair<uint64_t, Segment*>>& segments, FileHeader header) {
    std::map<const SegmentFile*, uint64_t> alive;
    for (const auto& [problem, s] : segments) alive[s->file] += s->nbytes();
    std::vector<std::pair<uint64_t, const Segment*>> moving;
    std::vector<Segment*> moved;
    for (const auto& [problem, s] : segments) {
      if (s->file && 4 * alive[s->file] >= 3 * s->file->body()) continue;
      check(*s);
      moving.emplace_back(problem, s);
      moved.push_back(s);
    }
    if (!moving.empty()) {
      header.number = next_++;
      write_segments(path(name("segments", header.number)), false, header, moving);
      const auto file = std::make_shared<SegmentFile>(path(name("segments", header.number)), true, true);
      for (size_t i = 0; i < moved.size(); ++i) *moved[i] = SegmentFile::segment(file, i);
      files_[header.number] = file;
    }
    header.magic = kManifestMagic, header.number = generation() + 1;
    write_manifest(segments, header);
    remove_old();
  }

 private:
  struct Line {  // a file: number, bytes, checksum of its header; a segment: line of its file, entry in it, 0
    uint64_t first, second, third;
  };

  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  static std::string name(const char* kind, uint64_t number) {
    char name[40];
    std::snprintf(name, sizeof name, "%s-%016" PRIx64, kind, number);
    return name;
  }

  Generation read_once(const std::string& manifest) const {
    const Bytes bytes(manifest, false, true);
    const FileHeader header = read_header<Line>(bytes, manifest, kManifestMagic);
    const auto* lines = reinterpret_cast<const Line*>(bytes.data() + sizeof header);
    std::vector<std::shared_ptr<SegmentFile>> listed;
    Files files;
    for (uint64_t i = 0; i < header.extra; ++i) {
      const auto known = files_.find(lines[i].first);
      const std::string file = path(name("segments", lines[i].first));
      const bool same = known != files_.end() && known->second->header().checksum == lines[i].third;
      listed.push_back(same ? known->second : std::make_shared<SegmentFile>(file, true, true));
      const FileHeader& found = listed.back()->header();
      if (found.checksum != lines[i].third || found.depth != header.depth)
        throw FileError(file, "it is not the file that the manifest names");
      files[lines[i].first] = listed.back();
    }
    Segments segments;
    segments.reserve(header.count - header.extra);
    for (uint64_t i = header.extra; i < header.count; ++i) {
      if (lines[i].first >= listed.size() || lines[i].second >= listed[lines[i].first]->header().count)
        throw FileError(manifest, "its table contradicts itself");
      const auto& file = listed[lines[i].first];
      segments.emplace_back(file->entry(lines[i].second).problem, SegmentFile::segment(file, lines[i].second));
    }
    return {header, std::move(files), std::move(segments)};
  }

  void write_manifest(const std::vector<std::pair<uint64_t, Segment*>>& segments, FileHeader& header) {
    std::map<const SegmentFile*, uint64_t> order;
    std::vector<Line> table;
    for (const auto& [problem, s] : segments)
      if (order.emplace(s->file, table.size()).second)
        table.push_back({s->file->header().number, s->file->header().bytes, s->file->header().checksum});
    header.extra = table.size();
    for (const auto& [problem, s] : segments) table.push_back({order[s->file], s->entry, 0});
    seal_header(header, table, 0);
    for (const std::string& target : {name("manifest", header.number), std::string("manifest")})
      write_file(path(target), false, [&](auto&& put) {
        put(&header, sizeof header);
        put(table.data(), table.size() * sizeof table[0]);
      });
    for (auto it = files_.begin(); it != files_.end();) {
      const bool stays = order.count(it->second.get());
      if (!stays) dead_[it->first] = header.number;
      it = stays ? std::next(it) : files_.erase(it);
    }
    header_ = header;
  }

  void remove_old() {
    for (auto it = dead_.begin(); it != dead_.end();) {
      const bool stays = it->second + kKept > generation();
      if (!stays) std::filesystem::remove(path(name("segments", it->first)));
      it = stays ? std::next(it) : dead_.erase(it);
    }
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      uint64_t number = 0;
      const std::string file = entry.path().filename();
      if (std::sscanf(file.c_str(), "manifest-%" SCNx64, &number) == 1 && number + kKept < generation())
        std::filesystem::remove(entry.path());
    }
  }

  std::string directory_;
  FileHeader header_;
  Files files_;
  std::map<uint64_t, uint64_t> dead_;  // file number: the first generation that does not need it
  uint64_t next_ = 1;
};

}  // namespace das
