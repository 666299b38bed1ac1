package level

import "time"

// Stats describes one level.
type Stats struct {
	Tier      string `json:"tier"`
	Units     int    `json:"units"`
	Capacity  int    `json:"capacity_units"`
	UnitBytes int    `json:"unit_bytes"`
	Evicted   uint64 `json:"evicted_units"`
	// In a report only: units that came back into the pool from here since the worker
	// started, and the ages of those that are here.
	Loaded  uint64  `json:"loaded_units"`
	OldestS float64 `json:"oldest_s"`
	MeanS   float64 `json:"mean_age_s"`
	// Of the SSD: how it is read and written, and why not by io_uring.
	IO    string `json:"io,omitempty"`
	NoIOU string `json:"no_io_uring,omitempty"`
	// Why the level is left alone; "" while it is not.
	LeftAlone string `json:"left_alone,omitempty"`

	Tenants int    `json:"-"` // that have units here, where they have shares
	Over    uint64 `json:"-"` // units evicted or left out for their tenant's share

	Remote *RemoteStats `json:"-"` // of a Remote, which has nothing of the above
}

// RemoteStats describes a shared store as this worker sees it.
type RemoteStats struct {
	URL       string     `json:"url"` // without credentials
	Prefix    string     `json:"prefix"`
	UnitBytes int        `json:"unit_bytes"`
	Reachable bool       `json:"reachable"` // false: it is left alone until a probe succeeds
	Writes    bool       `json:"writes"`
	Written   uint64     `json:"written_units"` // by this process
	LastError string     `json:"last_error,omitempty"`
	LastAt    *time.Time `json:"last_error_at,omitempty"`
}

// Ages sums up when units came into the tiers, seconds since 1970.
type Ages struct{ n, oldest, sum int64 }

// Add counts one unit.
func (a *Ages) Add(born int64) {
	if a.n++; a.n == 1 || born < a.oldest {
		a.oldest = born
	}
	a.sum += born
}

// Report puts the ages of all that were counted into s.
func (a *Ages) Report(s *Stats) {
	if a.n == 0 {
		return
	}
	at := float64(time.Now().Unix())
	s.OldestS, s.MeanS = max(at-float64(a.oldest), 0), max(at-float64(a.sum)/float64(a.n), 0)
}
