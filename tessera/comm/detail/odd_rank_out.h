#pragma once
#include <functional>

namespace tessera::comm {

// Of n ranks that should agree: the first rank that disagrees with a strict majority.
// -1: all agree, or no majority does.
//   {a a b a} -> 2;   {b a a} -> 0;   {a b} -> -1;   {a b c} -> -1
// Called only after ranks have been found to differ: it compares all pairs.
inline int odd_rank_out(int n, const std::function<bool(int, int)>& agree) {
  for (int i = 0; i < n; i++) {
    int same = 0, odd = -1;
    for (int j = 0; j < n; j++) {
      if (i == j || agree(i, j))
        same++;
      else if (odd < 0)
        odd = j;
    }
    if (2 * same > n) return odd;
  }
  return -1;
}

}  // namespace tessera::comm
