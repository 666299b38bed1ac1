//go:build !unix

package scarce

import "math"

// Files is how many files and sockets this process may have open: as many as it
// likes, where there is no such limit.
func Files() int { return math.MaxInt32 }
