package config

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Bad is the error of a key whose value will not do.
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

// Positive refuses durations of 0 and less.
func Positive(key string, d time.Duration) error {
	if d <= 0 {
		return Bad(key, "%v is not a positive duration", d)
	}
	return nil
}

// Within puts a section before the key of its error.
func Within(section string, err error) error {
	var keyed interface {
		error
		ConfigKey() string
	}
	if !errors.As(err, &keyed) {
		return err
	}
	return Bad(section+"."+keyed.ConfigKey(), "%s", strings.TrimPrefix(keyed.Error(), keyed.ConfigKey()+": "))
}
