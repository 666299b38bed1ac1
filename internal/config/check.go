package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Bad returns an error about a key's value.
func Bad(key, format string, args ...any) error {
	return &KeyError{Key: key, Msg: fmt.Sprintf(format, args...)}
}

// AtLeast refuses a value below least.
func AtLeast[T cmp.Ordered](key string, v, least T) error {
	if v < least {
		return Bad(key, "%v is below %v", v, least)
	}
	return nil
}

// Portion refuses values outside 0..1.
func Portion(key string, v float64) error {
	if !(v >= 0 && v <= 1) {
		return Bad(key, "%v is not within 0 and 1", v)
	}
	return nil
}

// OneOf refuses other words than those.
func OneOf(key, v string, words ...string) error {
	if !slices.Contains(words, v) {
		return Bad(key, "%q is none of %s", v, strings.Join(words, ", "))
	}
	return nil
}

// Positive refuses durations of 0 and less.
func Positive(key string, d time.Duration) error {
	if d <= 0 {
		return Bad(key, "%v is not a positive duration", d)
	}
	return nil
}

// Within puts a section before the key of its error.
func Within(section string, err error) error {
	if key, msg, ok := keyed(err); ok {
		return Bad(section+"."+key, "%s", msg)
	}
	return err
}
