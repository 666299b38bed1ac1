package pick

import "strings"

// A topology is labels from the widest to the narrowest, "zone-a/rack-3/host-7". The more of them
// two workers share from the left, the nearer they are.

// maxLabels is how many of them count.
const maxLabels = 8

// perLevel is the cost of each label that a pair does not share, in sequences.
const perLevel = 0.25

// zone is the first n labels.
func zone(topology string, n int) string {
	if n == 0 {
		return ""
	}
	at := 0
	for range n {
		i := strings.IndexByte(topology[at:], '/')
		if i < 0 {
			return topology
		}
		at += i + 1
	}
	return topology[:at-1]
}

func labels(topology string) int {
	if topology == "" {
		return 0
	}
	return strings.Count(topology, "/") + 1
}

// distance is how many labels two workers do not share; 0 if one has none.
func distance(a, b string) int {
	if a == "" || b == "" {
		return 0
	}
	for n := range maxLabels {
		x, restA, moreA := strings.Cut(a, "/")
		y, restB, moreB := strings.Cut(b, "/")
		if x != y {
			return min(1+max(labels(restA), labels(restB)), maxLabels-n)
		}
		if !moreA || !moreB {
			return 0
		}
		a, b = restA, restB
	}
	return 0
}
