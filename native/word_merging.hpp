// Byte-pair merging of words: a vocabulary's strings found by content, and the two rules by which symbols join.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ete {

// Where strings stand in a list, by content. The strings stay where they are, as a GGUF file stores them: string i is
// data[starts[i]] up to data[starts[i + 1] - 8]. Ids are positions in the list; of equal strings the first counts.
class StringIndex {
 public:
  StringIndex(const char* data, const int64_t* starts, int64_t count);

  int64_t count() const { return count_; }
  // Position of `text`, -1 where there is none.
  int32_t find(std::string_view text) const;
  // Position of the first string that equals an earlier one, -1 without such.
  int32_t duplicate() const { return duplicate_; }
  // Position of the first string that has no space between two parts of it, -1 without such.
  int32_t first_unspaced() const;

 private:
  struct Slot {
    uint32_t tag;
    int32_t position;
  };

  std::string_view string(int64_t position) const;
  uint64_t hash(std::string_view text) const;

  const char* data_;
  const int64_t* starts_;
  int64_t count_;
  uint64_t seed_;
  int32_t duplicate_ = -1;
  std::vector<Slot> slots_;
};

// A vocabulary of ranked merges. `merges` holds "left right" in order of rank.
struct RankedMerges {
  const StringIndex& tokens;
  const StringIndex& merges;
  bool ignore_merges;  // a word that is a token is taken whole
};

// A vocabulary of scored pieces. Of `tokens` only those with `mergeable` may result from merging; byte_ids has 256 ids.
struct ScoredPieces {
  const StringIndex& tokens;
  const bool* mergeable;
  const float* scores;
  const int32_t* byte_ids;
};

// A merge gave a symbol that is no token: the vocabulary is corrupt.
struct MergeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Append the ids of `word` (UTF-8). Symbols are characters at first; then neighbours join, the lowest rank (the highest
// score) first and the leftmost of equals. O(n log n) in the length of the word.
void encode_word(const RankedMerges& vocabulary, std::string_view word, std::vector<int32_t>& ids);
void encode_word(const ScoredPieces& vocabulary, std::string_view word, std::vector<int32_t>& ids);

}  // namespace ete
