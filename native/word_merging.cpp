#include "word_merging.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <queue>
#include <random>

namespace ete {

namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

struct Symbol {
  uint32_t start;
  uint32_t length;  // 0: taken by the left neighbour
  int32_t previous;
  int32_t next;
};

struct Candidate {
  double rank;
  int32_t left;
  int32_t right;
  uint32_t length;
};

struct Later {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
  }
};

int64_t character_length(unsigned char first) {
  if (first < 0x80) return 1;
  if (first < 0xE0) return 2;
  return first < 0xF0 ? 3 : 4;
}

// Symbols of `word` after all merges; rank(text, length of the left part) is empty where two symbols never join.
template <typename Rank>
std::vector<Symbol> merged_symbols(std::string_view word, const Rank& rank) {
  std::vector<Symbol> symbols;
  for (size_t start = 0; start < word.size();) {
    const size_t length = std::min<size_t>(character_length(word[start]), word.size() - start);
    const auto position = static_cast<int32_t>(symbols.size());
    symbols.push_back({static_cast<uint32_t>(start), static_cast<uint32_t>(length), position - 1, position + 1});
    start += length;
  }
  if (symbols.empty()) return symbols;
  symbols.back().next = -1;

  std::priority_queue<Candidate, std::vector<Candidate>, Later> candidates;
  const auto offer = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    const uint32_t length = symbols[left].length + symbols[right].length;
    const std::optional<double> found = rank(word.substr(symbols[left].start, length), symbols[left].length);
    if (found) candidates.push({*found, left, right, length});
  };
  for (int32_t left = 0; left + 1 < static_cast<int32_t>(symbols.size()); ++left) offer(left, left + 1);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& left = symbols[best.left];
    Symbol& right = symbols[best.right];
    // Stale when either symbol has merged since: symbols only grow, or become empty.
    if (left.length == 0 || right.length == 0 || left.length + right.length != best.length) continue;
    left.length = best.length;
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].previous = best.left;
    right.length = 0;
    offer(left.previous, best.left);
    offer(best.left, left.next);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.length == 0; });
  return symbols;
}

}  // namespace

StringIndex::StringIndex(const char* data, const int64_t* starts, int64_t count)
    : data_(data), starts_(starts), count_(count), seed_(std::random_device{}()) {
  size_t slots = 16;
  while (slots < 2 * static_cast<size_t>(count)) slots *= 2;
  slots_.assign(slots, {0, -1});
  const size_t mask = slots - 1;
  for (int64_t i = 0; i < count; ++i) {
    const std::string_view text = string(i);
    const uint64_t h = hash(text);
    size_t at = h & mask;
    const auto tag = static_cast<uint32_t>(h >> 32);
    while (slots_[at].position >= 0) {
      if (slots_[at].tag == tag && string(slots_[at].position) == text) break;
      at = (at + 1) & mask;
    }
    if (slots_[at].position < 0) {
      slots_[at] = {tag, static_cast<int32_t>(i)};
    } else if (duplicate_ < 0) {
      duplicate_ = static_cast<int32_t>(i);
    }
  }
}

std::string_view StringIndex::string(int64_t position) const {
  const int64_t start = starts_[position];
  return {data_ + start, static_cast<size_t>(starts_[position + 1] - 8 - start)};
}

// Seeded, so that no file can be made whose strings all fall into the same slot.
uint64_t StringIndex::hash(std::string_view text) const {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
  uint64_t h = mix(text.size() ^ seed_, kOdd);
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t part;
    std::memcpy(&part, text.data() + i, 8);
    h = mix(h ^ part, kOdd ^ seed_);
  }
  uint64_t rest = 0;
  if (i < text.size()) std::memcpy(&rest, text.data() + i, text.size() - i);
  return mix(h ^ rest, kOdd ^ seed_);
}

int32_t StringIndex::first_unspaced() const {
  for (int64_t i = 0; i < count_; ++i) {
    const size_t space = string(i).find(' ', 1);
    if (space == std::string_view::npos || space + 1 == string(i).size()) return static_cast<int32_t>(i);
  }
  return -1;
}

int32_t StringIndex::find(std::string_view text) const {
  const uint64_t h = hash(text);
  const auto tag = static_cast<uint32_t>(h >> 32);
  const size_t mask = slots_.size() - 1;
  for (size_t at = h & mask; slots_[at].position >= 0; at = (at + 1) & mask) {
    if (slots_[at].tag == tag && string(slots_[at].position) == text) return slots_[at].position;
  }
  return -1;
}

void encode_word(const RankedMerges& vocabulary, std::string_view word, std::vector<int32_t>& ids) {
  if (vocabulary.ignore_merges) {
    if (const int32_t whole = vocabulary.tokens.find(word); whole >= 0) {
      ids.push_back(whole);
      return;
    }
  }
  std::string pair;
  const auto rank = [&](std::string_view text, uint32_t left) -> std::optional<double> {
    pair.assign(text.substr(0, left)).append(1, ' ').append(text.substr(left));
    const int32_t found = vocabulary.merges.find(pair);
    return found < 0 ? std::nullopt : std::optional<double>(found);
  };
  for (const Symbol& symbol : merged_symbols(word, rank)) {
    const std::string_view text = word.substr(symbol.start, symbol.length);
    const int32_t id = vocabulary.tokens.find(text);
    if (id >= 0) {
      ids.push_back(id);
    } else if (text.size() > static_cast<size_t>(character_length(text[0]))) {
      throw MergeError(std::string(text));
    }
    // A byte without a token of its own is left out, as transformers does; vocabularies lack bytes UTF-8 never has.
  }
}

void encode_word(const ScoredPieces& vocabulary, std::string_view word, std::vector<int32_t>& ids) {
  const auto rank = [&](std::string_view text, uint32_t) -> std::optional<double> {
    const int32_t found = vocabulary.tokens.find(text);
    if (found < 0 || !vocabulary.mergeable[found]) return std::nullopt;
    return -static_cast<double>(vocabulary.scores[found]);
  };
  for (const Symbol& symbol : merged_symbols(word, rank)) {
    const std::string_view text = word.substr(symbol.start, symbol.length);
    const int32_t id = vocabulary.tokens.find(text);
    if (id >= 0 && vocabulary.mergeable[id]) {
      ids.push_back(id);
    } else {
      for (const char byte : text) ids.push_back(vocabulary.byte_ids[static_cast<unsigned char>(byte)]);
    }
  }
}

}  // namespace ete
